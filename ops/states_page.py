"""Draws a job's stages into ops/docs/states.md, from the table that the broker's code obeys.

python -m ops.states_page        # rewrites the drawn part of the page
"""

from pathlib import Path

from broker.service.stages import MOVES, Stage

PAGE = Path(__file__).parent / "docs" / "states.md"
BEGIN, END = "<!-- drawn by ops/states_page.py: begin -->", "<!-- end -->"


def renewed(page: str) -> str:
    """Return the page with its drawn part made anew. Raises ValueError where it has none."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{drawn()}\n{END}{after}"


def drawn() -> str:
    """Draw all stages and moves: a picture in Mermaid, and the same as a table."""
    ways = [
        (_name(move.source, none="QUEUED"), _name(move.target, none="GONE"), move.cause)
        for move in MOVES
    ]
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {source} --> {target}" for source, target, _ in ways]
    lines += ["```", "", "| from | to | when |", "|---|---|---|"]
    lines += [f"| {source} | {target} | {cause} |" for source, target, cause in ways]
    return "\n".join(lines) + "\n"


def _name(stage: Stage | None, *, none: str) -> str:
    return none if stage is None else stage.name


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
