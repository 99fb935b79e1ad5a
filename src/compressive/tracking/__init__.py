"""Experiment trackers: Weights & Biases, MLflow and Trackio, each in a process of its own."""

from compressive.tracking.group import TrackerGroup as TrackerGroup
from compressive.tracking.group import check_trackers as check_trackers
from compressive.tracking.group import tracked_run as tracked_run
from compressive.tracking.results import track_records as track_records
