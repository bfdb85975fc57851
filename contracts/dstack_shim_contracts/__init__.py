"""What dstack's server and its shim say to each other, and what a shim leaves on disk.

Words and shapes only: no input, no output, nothing of the other distributions. Importing this
package loads none of its modules, so each caller pays for what it uses:

``statuses``   task statuses, their transitions, termination reasons
``api``        bodies of the HTTP API as attrs models
``codec``      JSON bytes to models and back, rules of a submitted task
``record``     ``task.json``, the record of one task
``naming``     names derived from a task
``features``   the registry of features and the document inside a shim file
``versions``   what a reported version means
``gate``       which tasks survive a restart, and why
``client``     a typed HTTP client (needs the extra ``client``)
``schemas``    the same shapes as JSON Schema
``golden``     good and bad examples of every shape
``errors``     the tree of exceptions
"""
