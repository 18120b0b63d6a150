-- changed: runs with a changed queue, each with the number of its last change. The transaction that changes a queue
-- writes it, because a message to the scheduler may be lost.
local function record_change(prefix, run)
  redis.call('ZADD', prefix .. 'changed', redis.call('INCR', prefix .. 'changes'), run)
end
