"""CodeCarbon: energy and emissions of each machine of a run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError
from mega_train.config import LoggingConfig
from mega_train.telemetry.events import CheckpointSaved, Event, TrainStart


class CodeCarbon:
    """Writes `emissions-RRR.csv` into --codecarbon-dir, RRR the machine's first rank.

    It measures whole machines, so one rank of each does it. It makes no network requests: the grid is that of
    --codecarbon-country.
    """

    def __init__(self, log: LoggingConfig, rank: int) -> None:
        """Start to measure energy.

        Raises:
            ConfigError: codecarbon is not installed.
        """
        try:
            self._tracker_class: Any = import_module("codecarbon").OfflineEmissionsTracker
        except ImportError:
            hint = install_hint("mega-train", "codecarbon")
            raise ConfigError("--codecarbon-dir", "needs codecarbon", hint=hint) from None
        assert log.codecarbon_dir is not None
        self._folder = log.codecarbon_dir
        self._rank = rank
        self._country = log.codecarbon_country
        self._tracker: Any = None

    def on_event(self, event: Event) -> None:
        match event:
            case TrainStart():
                self._folder.mkdir(parents=True, exist_ok=True)
                self._tracker = self._tracker_class(
                    project_name="mega-train",
                    country_iso_code=self._country,
                    output_dir=str(self._folder),
                    output_file=f"emissions-{self._rank:03d}.csv",
                    log_level="error",
                    allow_multiple_runs=True,  # other runs may use this machine
                )
                self._tracker.start()
            case CheckpointSaved() if self._tracker is not None:
                self._tracker.flush()  # keeps the measurement if the run is killed later

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.stop()
