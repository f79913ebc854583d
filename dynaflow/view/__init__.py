"""Plans and timelines for people: `grid` (lanes as text), `diff` (two plans), `picture` (PNG), `chrome` (Perfetto)."""
