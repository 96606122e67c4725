"""Readers of recordings from other tools: one file per source, each with one IMPORTER.

An importer recognises its kind of file by content (accepts) and returns the events as a Trace (read).
"""

from stallscope.importers.registry import Importer, importer_for

__all__ = ["Importer", "importer_for"]
