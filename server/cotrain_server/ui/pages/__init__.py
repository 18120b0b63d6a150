"""Pages, one per file. A pure function creates the data from stored records, and a route reads and
shows it.
"""
