"""How often the answers on files of other tools are right: generated files of every format, with a known truth.

Right: exactly the culprits are named, or the files do not show them and the answer is inconclusive (counted as open).
"""

import sys
from pathlib import Path

from report import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.importers.generators import FORMATS, SHAPES, tally

N_SEEDS = 5


def main() -> None:
    """Mark all formats, print the table and report."""
    rows = []
    for form in FORMATS:
        marks = tally(form, range(N_SEEDS)).marks
        rows.append(
            {
                "format": form.name,
                "source": form.source,
                "n_cases": len(marks),
                "n_named": sum(m.result == "right" and bool(m.accused) for m in marks),
                "n_open": sum(m.result == "right" and not m.accused for m in marks),
                "n_inconclusive": sum(m.result == "inconclusive" for m in marks),
                "n_wrong": sum(m.result == "wrong" for m in marks),
                "n_healthy_with_fault": sum(m.answer == "healthy" and bool(m.truth.culprits) for m in marks),
                "wrong": [f"{m.shape} {m.seed}" for m in marks if m.result == "wrong"],
            }
        )
        print(
            f"{form.name:34}",
            {key: value for key, value in rows[-1].items() if key.startswith("n_")},
            flush=True,
        )
    n, right = sum(row["n_cases"] for row in rows), sum(row["n_named"] + row["n_open"] for row in rows)
    report(
        "files", {"shapes": list(SHAPES), "right_share": round(right / n, 4), "n_cases": n, "formats": rows}
    )


if __name__ == "__main__":
    main()
