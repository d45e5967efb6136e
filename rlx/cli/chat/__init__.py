"""`rlx chat`: the command, the line editor, the slash commands, and what the terminal shows of an answer."""
