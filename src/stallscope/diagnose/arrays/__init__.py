"""Array operations without knowledge of GPU jobs: grouping, ordering, subsampling, parallel evaluation."""

from stallscope.diagnose.arrays.grouping import median_of_others, numbered

__all__ = ["median_of_others", "numbered"]
