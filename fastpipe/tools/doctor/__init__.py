"""``fastpipe doctor``: check that a machine and its environment are suitable for input pipelines."""

from fastpipe.tools.doctor.examination import examine
from fastpipe.tools.doctor.report import DoctorReport, Finding

__all__ = ["DoctorReport", "Finding", "examine"]
