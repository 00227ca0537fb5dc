"""Parameters that are spread over ranks: who owns which matrix, what travels, and state that reshards."""
