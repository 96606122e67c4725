"""The state of hubs that share their data, from PostgreSQL alone: it also works while no hub runs."""

from typing import Any

from stallscope.store.shared.leases import directory
from stallscope.store.shared.postgres import Postgres


def status(postgres: Postgres, *, lease_s: float) -> dict[str, Any]:
    """Hubs, slots and their owners. unsealed_rows, oldest_unsealed_s: rows that are not in sealed files yet."""
    slots, members = directory(postgres, lease_s=lease_s)
    with postgres.transaction(is_snapshot=True) as db:
        unsealed = {
            slot: (n_rows, age_s)
            for slot, n_rows, age_s in db.execute(
                "SELECT slot, sum(n_rows)::bigint,"
                " extract(epoch FROM clock_timestamp())::float8 - min(received_us) / 1e6 FROM journal GROUP BY slot"
            ).fetchall()
        }
        ((n_files, n_bytes),) = db.execute(
            "SELECT count(*), coalesce(sum(n_bytes), 0)::bigint FROM segments"
        ).fetchall()
        ((n_dropped,),) = db.execute("SELECT count(*) FROM dropped").fetchall()
    owners = {each.slot: each.owner for each in slots if each.expires_in_s > 0}
    return {
        "hubs": [
            {
                "name": each.member.name,
                "peer": each.member.peer,
                "version": each.member.version,
                "is_alive": each.is_alive,
                "is_leaving": each.is_leaving,
                "seen_s_ago": round(each.seen_s_ago, 1),
                "bucket_away_s": each.state.get("bucket_away_s", 0.0),  # not reported by older hubs
                "n_slots": sum(owner == each.member.name for owner in owners.values()),
            }
            for each in members
        ],
        "slots": [
            {
                "slot": each.slot,
                "owner": owners.get(each.slot, ""),
                "epoch": each.epoch,
                "lease_s": round(max(0.0, each.expires_in_s), 1),
                "unsealed_rows": unsealed.get(each.slot, (0, 0.0))[0],
                "oldest_unsealed_s": round(unsealed.get(each.slot, (0, 0.0))[1], 1),
            }
            for each in slots
        ],
        "n_slots_without_owner": len(slots) - len(owners),
        "sealed_files": n_files,
        "sealed_bytes": n_bytes,
        "objects_to_delete": n_dropped,
    }
