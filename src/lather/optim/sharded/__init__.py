"""Parameters that are spread over ranks: the owner rank of every matrix, what ranks exchange, and
state that can be resharded."""
