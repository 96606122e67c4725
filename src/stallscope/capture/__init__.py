"""Finds processes and libraries, attaches probes, and drains records into arrays.

session.py is the public interface; sink.py describes the receiver of the rows. `stallscope check` and the commands also
use the names that probes and gpu export, and stacks_now.py.
"""
