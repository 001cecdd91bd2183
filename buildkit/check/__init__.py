"""``check``: will this image run on the GPU it is for, and without a network? Told from its bytes, without a GPU."""

from buildkit.check.report import CheckReport, FileReport, Finding
from buildkit.check.run import run_check
from buildkit.check.same import SameReport, same_fatbins

__all__ = ["CheckReport", "FileReport", "Finding", "SameReport", "run_check", "same_fatbins"]
