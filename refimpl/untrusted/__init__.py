"""What comes from elsewhere: files are opened within limits, and what they name is text on a terminal.

`files` opens a regular file of limited size. `text` prints: a name in a file may hold control characters, which would
move a terminal's cursor, or a stdout may have no letter for it.
"""
