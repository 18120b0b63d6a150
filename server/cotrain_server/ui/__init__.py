"""Web pages for operators and tenants under `/ui`. They show the content of the store, without a
build step.
"""
