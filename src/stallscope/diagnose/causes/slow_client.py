"""The client of an inference server does not read the response, or sends its request slowly.

Found by diagnose/serving, so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause

CAUSE = Cause(
    name="slow_client",
    title="waited for its client, which reads data slowly",
    noun="slow client",
    categories=(),
    advice=lambda _: [
        "No action on the server: the client or its network is slow. Limit the time that a response may take."
    ],
)
