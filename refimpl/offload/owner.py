"""A store is one engine's: two would both have a bucket 0."""

import weakref


def take_over(store, owner, keys, drop):
    """Note the engine whose shards are in a store from now on, and drop the `keys` of one that is gone. RuntimeError if
    another one lives."""
    other = store._owner and store._owner()
    if other is not None and other is not owner:
        raise RuntimeError(f"a {type(store).__name__} is used by two engines, and both have a bucket 0: give each a "
                           "store of its own")
    for key in keys if other is None else ():
        drop(key)
    store._owner = weakref.ref(owner)  # a store must not keep an engine alive
