"""The page at `/docs`: what `/openapi.json` says, for people. One HTML document, which asks nobody but the server.

The sources lie beside this module, in the form of the chat page.
"""
