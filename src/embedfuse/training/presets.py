"""What the command line takes where nothing is said: sizes and rates that suit the data.

Chosen on validation rows, never on test rows.
"""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "flights": {"batch_size": 512, "epochs": 2, "learning_rate": 0.01, "dropout": 0.3},
    "criteo": {"batch_size": 512, "embedding_learning_rate": 0.01, "schedule": "constant"},
    "synthetic": {"batch_size": 512, "epochs": 2, "learning_rate": 0.003, "embedding_learning_rate": 0.2},
}


def preset(model: str, data: str) -> dict[str, Any]:
    """Settings for that model on that data; nothing for data unknown."""
    return dict(PRESETS.get(data, {}))
