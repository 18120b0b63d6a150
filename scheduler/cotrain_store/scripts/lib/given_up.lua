-- given_up: counts of the failed ops after an expired gap. They stay in the log, but are not counted in their tenant's
-- queue until the gap closes or the run ends.
local GIVEN_UP = { 'given_up_ops', 'given_up_bytes', 'given_up_since' }

-- Set the counts of given-up ops, replacing the earlier ones.
local function set_given_up(log, queue, ops, bytes, since)
  local before = redis.call('HMGET', log, unpack(GIVEN_UP))
  if ops == 0 and not before[1] then
    return
  end
  redis.call('HINCRBY', queue, 'ops', tonumber(before[1] or 0) - ops)
  redis.call('HINCRBY', queue, 'bytes', tonumber(before[2] or 0) - bytes)
  if ops > 0 then
    redis.call('HSET', log, 'given_up_ops', ops, 'given_up_bytes', bytes, 'given_up_since', since)
  else
    redis.call('HDEL', log, unpack(GIVEN_UP))
  end
end
