"""One sequence of a call, as attention in tiles sees it: which tiles there are, and what is masked, dropped or changed
by a hook in one of them.
"""

from typing import NamedTuple

import torch

from .philox import dropped, runs_of
from .sequences import tiles


class SequenceTiles(NamedTuple):
    """Describes one sequence of a call: its heads, and which weights of a tile are masked or dropped."""

    call: object
    index: int
    heads: tuple  # (B, H, G)
    device: torch.device

    @property
    def sequence(self):
        """Return where the part lies, and its band."""
        return self.call.sequences[self.index]

    def tiles(self, sizes, is_new):
        """Yield (rows, [keys, …]) of the tiles that are to be computed: those of which `is_new(shape)` is True."""
        band = self.sequence.band
        for rows in tiles((band.fully_masked, band.T), sizes[0]):
            spans = [keys for keys in tiles(band.keys_seen(rows), sizes[1]) if is_new((
                rows[1] - rows[0], keys[1] - keys[0], band.all_seen(rows, keys), runs_of(keys), band.left, band.right))]
            if spans:  # in a dry run often none is new
                yield rows, spans

    def cut(self, by_query, by_key):
        """Return views of the sequence's own rows of tensors (B, H, T, …) and (B, G, S, …)."""
        queries, keys, _ = self.sequence
        return [x[:, :, slice(*queries)] for x in by_query] + [x[:, :, slice(*keys)] for x in by_key]

    exp_ = staticmethod(torch.Tensor.exp_)

    def load(self, x_BHTD, span):
        """Copy the rows `span` = (first, end) of x into a tile."""
        return load(x_BHTD, span, self.heads[2])

    def store(self, x_BHTD, span, tile_BGRD):
        """Copy a tile back to the rows `span`, rounded to x's dtype."""
        place = x_BHTD[:, :, slice(*span)].unflatten(1, (self.heads[2], -1))
        place.copy_(tile_BGRD.view(place.shape))

    def add(self, x_BGSD, span, tile_BGSD):
        """Add a tile to the rows `span`."""
        x_BGSD[:, :, slice(*span)].add_(tile_BGSD)

    def fill_masked(self, tile_BGRS, rows, keys, value):
        """Write `value` where a row does not see a key. Returns the tile, (B, G, H/G · rows, keys)."""
        mask_TS = self.sequence.band.mask(rows, keys, self.device)
        if mask_TS is not None:
            tile_BGRS.unflatten(2, (-1, len(mask_TS))).masked_fill_(mask_TS, value)  # one for H/G heads
        return tile_BGRS

    def places(self, rows, keys):
        """Return (b, h, q_idx, k_idx) of a tile, for hooks: of a query the position of the key beside it."""
        batch = (self.index, self.index + 1) if self.call.packed else (0, self.heads[0])
        b, h, i, j = (torch.arange(*each, device=self.device) for each in (batch, (0, self.heads[1]), rows, keys))
        return b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i[:, None] + (self.sequence.band.S - self.sequence.band.T), j

    def by_head(self, tile_BGRS, rows):
        """Return a tile of scores as (B, H, rows, keys)."""
        return tile_BGRS.view(*self.heads[:2], -1, tile_BGRS.shape[-1])

    def by_hook(self, function, s_BGRS, rows, keys):
        """Return `function` of the scores of a tile, a hook's forward or derivative; (B, G, H/G · rows, keys).

        The caller writes to it. It is no view by `expand`, even of one shape to the same: torch.compile turns a write
        to that into base + (new − base), which is NaN where the base is −∞.
        """
        s_BHTS = self.by_head(s_BGRS, rows)
        found = function(s_BHTS, *self.places(rows, keys))
        if not isinstance(found, torch.Tensor):
            return found
        return (found if found.shape == s_BHTS.shape else found.expand_as(s_BHTS).contiguous()).reshape(s_BGRS.shape)

    def dropped(self, rows, keys):
        """Return the tile of the dropout mask, (B, G, H/G · rows, keys); None without dropout."""
        (B, H, G), call = self.heads, self.call
        if call.seed is None:
            return None
        # Philox counts over the whole batch, not this sequence
        rows, keys = ([self.sequence[i][0] + x for x in span] for i, span in enumerate((rows, keys)))
        dropped_BHTS = dropped(call.seed, call.dropout_p, B, H, rows, keys, self.device)
        return dropped_BHTS.unflatten(1, (G, -1)).flatten(2, 3)


def load(x_BHTD, span, groups):
    """Copy the rows `span` = (first, end) into a contiguous tile of wide dtype, (B, G, H/G · rows, D).

    The heads of a group become rows of one matrix. A kernel would load such a tile into on-chip memory.
    """
    tile = x_BHTD[:, :, slice(*span)].unflatten(1, (groups, -1))
    # a copy even of fp32: the caller scales it in place
    wide = torch.promote_types(x_BHTD.dtype, torch.float32)
    return tile.to(wide, memory_format=torch.contiguous_format, copy=True).flatten(2, 3)
