"""Stallscope: which rank slows down a GPU job, since when, why, and at what cost?"""

__version__ = "0.1.0"
