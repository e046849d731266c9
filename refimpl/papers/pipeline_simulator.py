"""A pipeline in one screen, without ranks: what each does in which order, when, where it waits and what it holds.

Stage s has some consecutive layers. Of micro-batch j it computes, in this order,

    F(s, j)       the forward                               after F(s−1, j), which sends its output
    B(s, j)       the gradient of the stage's input         after F(s, j) and B(s+1, j), which sends it down
    W(s, j)       the gradients of the stage's weights      after B(s, j): nobody waits for it
    FULL(s, j)    B and W at once: the rank before waits for both

A schedule is a list for each rank. An instruction begins when the rank has ended the one before, and when what it waits
for has ended. So time is arithmetic, and so is a deadlock: no rank can take its next instruction. Activations live from
F to W. With F, B, W of cost 1 each, on p ranks the first rank waits for, and holds,

    1F1B      (p−1) (F+B+W)     p micro-batches, rank r p − r     Narayanan et al. 2021, section 2.2.1
    ZB-H1     (p−1) (F+B−W)     p micro-batches on all ranks      Qi et al. 2023, section 2.1.1
"""


def one_forward_one_backward(p, m):
    """Rank r: p − 1 − r forwards ahead, then one forward and one backward in turn."""
    orders = []
    for r in range(p):
        ahead = min(p - 1 - r, m)
        order = [("F", r, j) for j in range(ahead)]
        for j in range(m):
            if ahead + j < m:
                order.append(("F", r, ahead + j))
            order.append(("FULL", r, j))
        orders.append(order)
    return orders


def zb_h1(p, m):
    """The same with each backward cut in two, and the Ws of rank r late by r micro-batches: they fill its gaps."""
    orders = []
    for r, whole in enumerate(one_forward_one_backward(p, m)):
        order = []
        for kind, _, j in whole:
            order.append(("F" if kind == "F" else "B", r, j))
            if kind == "FULL" and j >= r:
                order.append(("W", r, j - r))
        orders.append(order + [("W", r, j) for j in range(max(m - r, 0), m)])
    return orders


def waits_for(kind, s, j, stages):
    """The results that an instruction needs. A FULL brings what a B brings."""
    if kind == "F":
        return [("F", s - 1, j)] if s > 0 else []
    if kind == "W":
        return [("B", s, j)]
    return [("F", s, j)] + ([("B", s + 1, j)] if s + 1 < stages else [])


def simulate(orders, stages, F=1, B=1, W=1):
    """Return ({instruction: (begin, end)}, idle time of each rank, most activations at once of each rank)."""
    cost = {"F": F, "B": B, "W": W, "FULL": B + W}
    at, clock, end, times = [0] * len(orders), [0] * len(orders), {}, {}
    while len(times) < sum(map(len, orders)):
        before = len(times)
        for r, order in enumerate(orders):
            while at[r] < len(order) and all(need in end for need in waits_for(*order[at[r]], stages)):
                kind, s, j = order[at[r]]
                begin = max([clock[r]] + [end[need] for need in waits_for(kind, s, j, stages)])
                clock[r] = end["B" if kind == "FULL" else kind, s, j] = begin + cost[kind]
                times[kind, s, j] = (begin, clock[r])
                at[r] += 1
        if len(times) == before:
            stuck = [f"rank {r} at {order[at[r]]}" for r, order in enumerate(orders) if at[r] < len(order)]
            raise ValueError("deadlock: " + ", ".join(stuck))
    idle = [times[order[-1]][1] - times[order[0]][0] - sum(cost[kind] for kind, _, _ in order) for order in orders]
    return times, idle, [most_in_flight(order) for order in orders]


def most_in_flight(order):
    """The most activations that a rank holds at once: its order alone decides."""
    now = most = 0
    for kind, _, _ in order:
        now += {"F": 1, "B": 0, "W": -1, "FULL": -1}[kind]
        most = max(most, now)
    return most
