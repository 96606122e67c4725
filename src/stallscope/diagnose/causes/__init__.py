"""Why a rank was late: one file per cause, each with one CAUSE.

A cause claims a part of the excess: what a late rank's ledger shows beyond its peers' in the same calls. Most
claim the time of one ledger category; some need counts of calls beside it.
"""

from stallscope.diagnose.causes._registry import Cause, Excess, Explained, explained, leading

__all__ = ["Cause", "Excess", "Explained", "explained", "leading"]
