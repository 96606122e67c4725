#!/bin/sh
# Removes the files that Python has cached in the folder of the package. During an upgrade the folder has a program.
[ -e /usr/lib/stallscope/bin/stallscope ] || rm -rf /usr/lib/stallscope
