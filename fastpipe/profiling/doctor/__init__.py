"""``fastpipe doctor``: whether a machine and its environment are fit for input pipelines."""

from fastpipe.profiling.doctor.examining import examine
from fastpipe.profiling.doctor.findings import Finding
from fastpipe.profiling.doctor.report import DoctorReport

__all__ = ["DoctorReport", "Finding", "examine"]
