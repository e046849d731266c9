"""What every attention here shares, whatever computes it. In reading order: `sequences` says which keys a query sees
and where packed sequences lie, `philox` which weights dropout takes, `arguments` checks a call and fills in its
defaults.
"""
