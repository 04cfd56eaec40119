"""Online RL for World-Action Models, as an RLinf plugin.

``register`` is RLinf's extension hook: set ``RLINF_EXT_MODULE=rlinf_wamrl`` and RLinf calls it in
every worker process. Importing this package imports nothing heavy.
"""

__version__ = "0.1.0"

__all__ = ["__version__", "register"]


def register() -> None:
    """Make the plugin's model, environment, losses and advantages known to RLinf (idempotent)."""
    from rlinf_wamrl.runtime import plugin

    plugin.register()
