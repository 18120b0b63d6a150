"""Changes by the operator, validated, applied and recorded in the audit log. Independent of routes
and pages.
"""
