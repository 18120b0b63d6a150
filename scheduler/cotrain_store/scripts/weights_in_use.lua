-- weights_in_use: a part of other scripts: whether a checkpoint or a living sampler refers to
-- sampler weights. Users that are gone (expired, or a name that moved on) are struck off.
local function in_use(ref)
  local users, used = 'cotrain:weights:' .. ref .. ':users', false
  for _, user in ipairs(redis.call('SMEMBERS', users)) do
    local kind, name = string.sub(user, 1, 1), string.sub(user, 3)
    local lives
    if kind == 's' then
      lives = redis.call('EXISTS', 'cotrain:sampler:' .. name) == 1
    else
      local record = redis.call('GET', 'cotrain:checkpoint:' .. name)
      lives = record and cjson.decode(record)['weights'] == ref
    end
    if lives then
      used = true
    else
      redis.call('SREM', users, user)
      local session = kind == 's' and string.match(name, '^(.*):sample:')
      if session then
        redis.call('SREM', 'cotrain:session:' .. session .. ':samplers', name)
      end
    end
  end
  return used
end
