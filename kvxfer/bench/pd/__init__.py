"""``kvxfer bench pd``: pairs of engines under different connectors, and one engine alone, given the same requests.

``points`` says what is sent, ``arms`` what it is sent to, ``window`` sends it and keeps time, ``sitting`` decides who is up
when and whose turn it is, ``verify`` compares tokens, ``tables`` sums up. Nothing here favours a connector: both legs go
straight from this client to the engines, in the order in which upstream's example proxies send them.
"""
