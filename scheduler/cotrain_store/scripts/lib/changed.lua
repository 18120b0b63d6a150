-- changed: the runs whose queue is not as it was, each under the number of its last change. Written by the
-- transaction that changes it: a message to the scheduler may be lost, this cannot.
local function note_change(prefix, run)
  redis.call('ZADD', prefix .. 'changed', redis.call('INCR', prefix .. 'changes'), run)
end
