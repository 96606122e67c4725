"""The recording that ships with the package: a real job on four H100 GPUs, cut to the events that are needed."""

from importlib.resources import as_file, files

from stallscope.events.trace import Trace
from stallscope.importers import importer_for


def recorded() -> Trace:
    """The shipped recording as a trace. Raises BadInput when pyarrow is not installed."""
    with as_file(files("stallscope.demo") / "recorded") as folder:
        return importer_for(folder).read(folder)
