"""The report and its verdicts as data and as text."""
