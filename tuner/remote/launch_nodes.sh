#!/usr/bin/env bash
# @title@
# Run it on every node, with the number of the node from 0 to @last@ and the address of node 0:
#
#   NODE_RANK=0 HEAD=10.0.0.1 bash @script@
#
# Node 0 runs the study, the others serve it until it ends. When it is run again, the study goes on.
set -euo pipefail
: "${NODE_RANK:?is the number of this node, 0 to @last@}"
: "${HEAD:?is the address of node 0}"
@needs@
cd @directory@
@setup@
