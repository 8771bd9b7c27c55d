"""Which prefix blocks the requests given to each worker hold: a router's own books.

A request holds its whole chain, so the blocks active on a worker are closed under prefixes: what a
new request shares with them is its longest leading run.
"""

from broker.sim.request import Request


class ActiveBlocks:
    """Counts holders of each block per worker; a block leaves with its last holder."""

    def __init__(self) -> None:
        self._holders: dict[int, dict[int, int]] = {}

    def add(self, request: Request, *, worker_id: int) -> None:
        """Book a request on a worker."""
        holders = self._holders.setdefault(worker_id, {})
        for block in request.blocks:
            holders[block] = holders.get(block, 0) + 1

    def remove(self, request: Request, *, worker_id: int) -> None:
        """Take a request off; a worker that was lost has no books."""
        holders = self._holders.get(worker_id)
        if holders is None:
            return
        for block in request.blocks:
            left = holders.get(block, 0) - 1
            if left > 0:
                holders[block] = left
            else:
                holders.pop(block, None)

    def lost(self, worker_id: int) -> None:
        """Drop a worker's books."""
        self._holders.pop(worker_id, None)

    def shared_tokens(self, request: Request, worker_id: int) -> int:
        """Return the tokens of the leading blocks that requests active there hold already."""
        holders = self._holders.get(worker_id)
        if not holders:
            return 0
        shared = 0
        for block in request.blocks:
            if block not in holders:
                break
            shared += 1
        return shared * request.block_tokens
