"""Array operations without knowledge of GPU jobs: grouping, ordering, subsampling, parallel evaluation."""
