"""Does the peak fit into a budget, and with which of the cheapest techniques? They are tried, alone, then together."""

CHEAPEST = ("none", "masks", "mlp", "logits", "attention", "recompute", "bf16", "autocast", "int8", "host")
NO_SWITCH = ("accumulate", "rows", "chunks", "offload")  # they need another loop


def fitting(found, budget, tried):
    """Yield lines. `found`: the JSON of a run; `budget`: bytes; `tried(*names)`: the JSON of a run with techniques of
    `switch.SWITCHES` switched on."""
    if "peak" not in found:
        return
    peak, saves = found["peak"], {each["name"]: each["saves"] for each in found["helps"]}
    if peak <= budget:
        yield f"the budget: {peak:,} bytes fit into {budget:,}"
        return
    need = peak - budget
    yield f"the budget: {peak:,} bytes are {need:,} more than {budget:,}"
    for each in found["answers"]:
        if each["saves"] >= need and not each["bound"]:
            yield f"fits, as predicted: {each['change']}"
    names = [name for name in CHEAPEST if saves.get(name)]
    yield from _tries(names, saves, need, budget, tried)
    for each in found["helps"]:
        if each["saves"] >= need and (each["name"] in NO_SWITCH or each["ranks"]):
            yield f"may fit, at most {each['saves']:,} bytes less: {each['title']}"


def _tries(names, saves, need, budget, tried):
    """Yield what came of the cheapest techniques: the first that is said to be enough, then more and more of them."""
    enough, chosen, lowest = [[name] for name in names if saves[name] >= need][:1], [], None
    for some in enough:
        peak = tried(*some).get("peak")
        yield _tried(some, peak, budget)
        if peak and peak <= budget:
            return
    for name in names:
        if [*chosen, name] in enough:
            continue
        found = tried(*chosen, name)
        peak = None if found["status"] else found.get("peak")
        if peak is not None and (lowest is None or peak < lowest):
            chosen, lowest = [*chosen, name], peak
            yield _tried(chosen, peak, budget)
        if lowest is not None and lowest <= budget:
            return


def _tried(names, peak, budget):
    if peak is None:
        return f"tried, and it failed: {' + '.join(names)}"
    return f"tried, {'fits' if peak <= budget else 'too much'}: {' + '.join(names)}, {peak:,} bytes"
