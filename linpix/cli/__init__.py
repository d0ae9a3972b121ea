"""The commands of service and models, most of which work without a server, and the functions of
`import linpix`.
"""
