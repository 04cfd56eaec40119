"""From scripted experts to a small World-Action Model that RL can start from."""
