"""One file per page: a pure function makes its data of what the store holds, a route reads and shows it."""
