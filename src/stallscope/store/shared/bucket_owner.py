"""One database, one place in a bucket: each hub checks at its start that the two belong together.

Two databases with one prefix would delete each other's files, because no list of theirs names the files of the other.
Two prefixes with one database would be two halves, of which each hub could read only its own.
"""

import secrets

from stallscope.errors import BadInput
from stallscope.store.shared.bucket import Bucket
from stallscope.store.shared.postgres import Postgres

KEY = "hubs-id"
"""The object with the ID of the hubs of one database. A copy of the bucket contains it."""
_ID, _IS_WRITTEN = "id", "id in bucket"


def claim(postgres: Postgres, bucket: Bucket) -> None:
    """Note the ID of the database in the bucket, once. Raises BadInput for the bucket of another database."""
    with postgres.transaction() as db:
        db.execute("INSERT INTO secrets VALUES (%s, %s) ON CONFLICT DO NOTHING", [_ID, secrets.token_hex(8)])
        known: dict[str, str] = dict(db.execute("SELECT name, value FROM secrets").fetchall())
    own, found = known[_ID], bucket.find(KEY)
    if found is not None and found.decode(errors="replace") != own:
        raise BadInput(
            f"the hubs of another database use --bucket {bucket.location}; give each database a prefix of its own, or"
            f" delete the object {KEY} there if that database no longer exists"
        )
    if found is None:
        if _IS_WRITTEN in known:
            raise BadInput(
                f"the files of the database {postgres.address} are not in --bucket {bucket.location}: the object {KEY}"
                " is missing there; give the bucket of the other hubs, or copy all its objects"
            )
        bucket.put(KEY, own.encode())
    with postgres.transaction() as db:
        db.execute("INSERT INTO secrets VALUES (%s, 'yes') ON CONFLICT DO NOTHING", [_IS_WRITTEN])
