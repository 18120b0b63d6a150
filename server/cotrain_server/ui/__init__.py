"""Web pages for operators and tenants under `/ui`: what they show is what the store holds; no build step."""
