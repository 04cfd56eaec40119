"""Dataset statistics for tests: symmetric ranges of any width."""

from rlinf_wamrl.normalisation import DatasetStatistics, FieldStatistics


def statistics(action: int = 7, proprio: int = 8) -> DatasetStatistics:
    def field(width: int) -> FieldStatistics:
        return FieldStatistics(
            min=(-1.0,) * width,
            max=(1.0,) * width,
            mean=(0.0,) * width,
            std=(0.5,) * width,
            q01=(-0.9,) * width,
            q99=(0.9,) * width,
        )

    return DatasetStatistics(
        action=field(action), proprio=field(proprio), num_episodes=2, num_transitions=100
    )
