"""Options of an optimizer's groups (learning rate and the like), which a wrapper and the optimizer inside both hold."""


def replace(group, other):
    """Make the options of `group` those of `other`. Its parameters stay."""
    parameters = group["params"]
    group.clear()  # an option that the other does not have goes, too
    group.update({**other, "params": parameters})


def remember(groups):
    """Return the options as they are now, for `check_unchanged`."""
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def check_unchanged(remembered, groups):
    """Raise ValueError if an option of the inner optimizer was changed since: the wrapper's would overwrite it."""
    for then, now in zip(remembered, groups, strict=True):
        for name in then.keys() & now.keys():
            if now[name] is not then[name] and now[name] != then[name]:
                raise ValueError(f"{name} of the inner optimizer was changed from {then[name]} to {now[name]}, which "
                                 "the next step would overwrite: give schedulers the MixedPrecisionOptimizer, and "
                                 "change its param_groups")
