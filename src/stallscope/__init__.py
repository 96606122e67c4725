"""Stallscope: which rank drags a GPU job, since when, why, and what does it cost?"""

__version__ = "0.1.0"
