-- run_bytes: what the runs of tenants hold at rest, each from the request that makes it until no file of it is
-- left. A run's log says what it counts for (`weight`), and which part of that is not on disk yet (`unwritten`):
-- room for that is claimed, so that no other run is made in it.
local HELD, CLAIMED = 'cotrain:tenants:run_bytes', 'cotrain:run_bytes:unwritten'
local LEAVES = 3 -- one tenant's copies may weigh so many times what then is left of the disk for all

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

local function note_copy(log, size)
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

-- Why a run that weighs so much cannot be made; nothing where it can.
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
