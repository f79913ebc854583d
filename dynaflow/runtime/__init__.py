"""run: issue a bound plan. Holds no policy."""
