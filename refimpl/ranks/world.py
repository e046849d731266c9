"""How the ranks of a launch are connected, which the caller of `run` says. `comm.launch` connects Communicators."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import RankError


class World:
    """`size` ranks that are not connected: a function's first argument is its rank. Subclasses connect them.

    A world is pickled for each rank, so its class has to stand in a module that ranks can import; the process that
    forks ranks imports that module in advance.

    - `folders`: directories of the code in which a rank waits for others. If all ranks hang, those that hang
      elsewhere are to blame.
    - `hint`: what the reader can try when ranks wait for each other, a sentence for the error message.

    Each rank has a record, bytes that the caller can read at any time, also when the rank hangs or was killed. What is
    in it is the world's affair; a change shows that the rank goes on.
    """

    folders = ()
    hint = ""

    def __init__(self, size: int) -> None:
        self.size = size

    def connect(self, rank: int, store: Any, record: Any) -> Any:
        """Connect this process as `rank`; return the first argument of the function.

        `store` is a `torch.distributed.TCPStore` that all ranks of the launch share. `record`: a memoryview.
        """
        return rank

    def disconnect(self) -> None:
        """Close what `connect` opened. Each rank calls it after all ranks have returned."""

    def explain(self, records: Any) -> "RankError | None":
        """Return the RankError that explains why ranks hang, or why their connections broke; None if nothing does.

        `records`: the bytes of each rank's record.
        """

    def waits(self, records: Any) -> dict[int, str]:
        """Return {rank: what it waits for}, a text, as far as records tell."""
        return {}

    def stuck(self, records: Any, returned: Any) -> "RankError | None":
        """Return the RankError for ranks that wait for what cannot come any more; else None. `returned`: ranks."""
