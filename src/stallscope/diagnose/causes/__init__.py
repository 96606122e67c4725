"""Why a rank was late: one file per cause, each with one CAUSE.

A cause claims a part of the excess: the time by which a late rank's ledger exceeds its peers' in the same calls. Most
causes claim the time of one ledger category; some need counts of calls as well.
"""

from stallscope.diagnose.causes._registry import Cause, Excess, Explained, all_causes, explained, leading

__all__ = ["Cause", "Excess", "Explained", "all_causes", "explained", "leading"]
