"""What every attention here shares, whatever computes it. In reading order: `band` says which keys a query sees,
`philox` which weights dropout takes, `arguments` checks a call and fills in its defaults.
"""
