"""Readers of what others recorded: one file per source, each with one IMPORTER.

An importer tells by content whether a path is its kind (sniff) and gives the events as a Trace (read).
"""

from stallscope.importers.registry import Importer, importer_for

__all__ = ["Importer", "importer_for"]
