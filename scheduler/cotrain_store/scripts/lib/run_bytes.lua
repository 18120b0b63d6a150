-- run_bytes: bytes of idle runs per tenant. A run counts from the request that creates it until its last file is
-- deleted. Its log holds its size (`weight`) and the part that is not on disk yet (`unwritten`). Disk space for the
-- latter is reserved, so that no other run can be created in it.
local HELD, CLAIMED = 'cotrain:tenants:run_bytes', 'cotrain:run_bytes:unwritten'
local LEAVES = 3 -- maximum ratio of one tenant's copies to the free disk space after them

local function held_by(tenant)
  return tonumber(redis.call('ZSCORE', HELD, tenant) or 0)
end

local function hold_run(log, tenant, bytes, unwritten)
  if redis.call('HSETNX', log, 'weight', bytes) == 1 then
    redis.call('HSET', log, 'unwritten', unwritten)
    redis.call('ZINCRBY', HELD, bytes, tenant)
    redis.call('INCRBY', CLAIMED, unwritten)
  end
end

local function record_copy(log, size)
  local unwritten = tonumber(redis.call('HGET', log, 'unwritten') or 0)
  local written = math.min(unwritten, size)
  if written > 0 then
    redis.call('HINCRBY', log, 'unwritten', 0 - written)
    redis.call('DECRBY', CLAIMED, written)
  end
end

local function release_run(log)
  local row = redis.call('HMGET', log, 'weight', 'unwritten', 'tenant')
  if row[1] then
    redis.call('HDEL', log, 'weight', 'unwritten')
    redis.call('DECRBY', CLAIMED, tonumber(row[2]))
    if tonumber(redis.call('ZINCRBY', HELD, 0 - row[1], row[3])) <= 0 then
      redis.call('ZREM', HELD, row[3])
    end
  end
end

-- Return the reason why a run of this size cannot be created, or nil.
local function refuse_run(tenant, weighs)
  local held = held_by(tenant)
  if held + weighs.bytes > weighs.quota then
    return { 'RUN_BYTES', held, weighs.quota }
  end
  local copies = (held + weighs.bytes) * weighs.disk_bytes / math.max(1, weighs.bytes)
  local left = weighs.free_bytes - tonumber(redis.call('GET', CLAIMED) or 0)
  if copies > LEAVES * (left - weighs.disk_bytes) then
    return { 'RUN_DISK', held, math.max(0, left) }
  end
end
